"""How a value that a file needs is given."""

HOW = "give it with --set {name}=VALUE, or those of a file with --env-file FILE or --values FILE"
