"""The half of ingle that provisions, routes and accounts. It never touches a tensor."""
