"""Other people's training loops: each module here needs its client installed, and nothing else imports it."""
