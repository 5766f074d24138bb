"""Transports by which the end that wants pages reads them out of the other end's memory."""
