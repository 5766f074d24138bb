"""Ranks in processes of their own: the crew, a rank's process, their messages and sockets."""
