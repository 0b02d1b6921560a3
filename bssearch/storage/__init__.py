"""SQL of bssearch's own database: tables, migrations and the store."""
