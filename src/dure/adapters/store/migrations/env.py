"""What alembic runs: revisions on the connection that the store has opened.

Rule: one transaction holds the whole upgrade, under the writers' lock, so that two servers
can start on one empty database.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
