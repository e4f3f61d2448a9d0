"""What crosses the border to the author's function: the subject it returns, its adapters, and the call itself."""
