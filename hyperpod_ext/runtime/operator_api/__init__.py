"""What AWS's operator of HyperPod on EKS asks of the agent in a pod, served by ours: five calls over HTTP."""
