"""What a run says about itself: metrics, time shares, progress, intervals and the sinks they go to."""
