"""What runs inside a rank: its main loop, rendezvous, control channel, reset, tracebacks and warnings."""
