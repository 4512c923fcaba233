"""A cluster with everything around it: what its CDK app makes, what that costs, what a change would replace.

The app runs in a process of its own: nothing here imports CDK.
"""
