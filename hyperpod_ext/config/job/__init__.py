"""The spec of a job. The container reads only `runtime`, a small part of it."""
