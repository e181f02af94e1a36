"""How large drafts are: a cost model, calibrated confidence, and a budget of nodes over the whole batch."""
