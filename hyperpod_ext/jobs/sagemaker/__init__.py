"""SageMaker training jobs: the one neutral CreateTrainingJob request, and what speaks to the service."""
