"""Helpers by which judges name the pattern, the expectation or the factor behind a finding."""
