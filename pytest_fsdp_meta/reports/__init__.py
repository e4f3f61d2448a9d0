"""What people read: verdicts as text."""
