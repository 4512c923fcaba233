"""SageMaker training jobs: the CreateTrainingJob request, and clients of the service."""
