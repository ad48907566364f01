"""What is seen from outside: metrics, status, audit."""
