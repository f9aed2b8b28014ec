"""What several tests share: suites, misbehaving parts, and makers of small inputs."""
