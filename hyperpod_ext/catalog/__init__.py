"""Facts about AWS and Kubernetes as data files, each with its source, and look-ups in them."""
