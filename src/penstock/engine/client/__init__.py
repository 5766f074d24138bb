"""The API process's side of its engines: submit, stream, metrics, choice of a replica."""
