"""The half of ingle that runs models. It never touches a database."""
