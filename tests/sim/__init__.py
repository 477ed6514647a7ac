"""The real reconciler, autoscaler, activator and router on a simulated clock, where cloud and database fail."""
