"""What runs inside a jail, as the job's user. Standard library only, syntax of Python 3.9."""
