"""What is judged, one folder per topic: plain facts, what observes them on ranks, and judges, which are pure."""
