"""SQL queries of users: a process with limits, and the console."""
