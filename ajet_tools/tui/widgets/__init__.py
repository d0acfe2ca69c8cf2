"""What several screens draw with."""
