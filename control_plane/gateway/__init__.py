"""A tenant's request: tls, authenticate, limit, activate, route, proxy, meter."""
