"""The only home of Ray: clusters, telemetry actors, trials and studies."""
