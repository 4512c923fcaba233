"""Numbers of a job while it runs, from its events: for Prometheus, for `hp-ext top`, and spans for OpenTelemetry."""
