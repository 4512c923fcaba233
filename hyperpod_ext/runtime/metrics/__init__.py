"""Metrics of a running job, computed from its events: for Prometheus, for `hp-ext top`, and as OpenTelemetry spans."""
