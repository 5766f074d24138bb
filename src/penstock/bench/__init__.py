"""`penstock bench`: how fast, offline against transformers or over HTTP, with spread and plots."""
