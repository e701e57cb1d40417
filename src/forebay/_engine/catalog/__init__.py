"""The catalog: the only SQL of the engine, and the only room that knows SQLite.

`connection` owns the connection, the writer lock and the transactions; each other module holds the statements about one table.
"""

from __future__ import annotations

from forebay._engine.catalog.connection import Catalog as Catalog
from forebay._engine.catalog.connection import Rows as Rows
from forebay._engine.catalog.connection import Txn as Txn
