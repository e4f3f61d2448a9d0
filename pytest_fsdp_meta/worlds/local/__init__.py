"""Ranks on this machine: a fork server that has imported torch, and the processes it forks."""
