"""The schema's history; alembic runs it when a store opens."""
