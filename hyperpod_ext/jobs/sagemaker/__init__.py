"""SageMaker training jobs: rendering of the CreateTrainingJob request, and calls to SageMaker's API."""
