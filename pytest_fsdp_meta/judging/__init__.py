"""What judges share: the registry and the engine, the evidence as a judge sees it, gates, limits and causes."""
