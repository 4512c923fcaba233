"""What a pod and its containers can be told, in Kubernetes' own words: as deep as something can be wrong."""
