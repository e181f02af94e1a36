"""Several processes that serve copies of one model behind one port: what they are told, which one gets a request."""
