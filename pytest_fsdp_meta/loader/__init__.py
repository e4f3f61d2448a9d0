"""The interface to the user's loader: the Subject that it returns, adapters for its shards, and the call itself."""
