"""The migrations, one module each; the SQL stands in ../sql."""
