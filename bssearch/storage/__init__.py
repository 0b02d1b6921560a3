"""All SQL of bssearch: tables, migrations and the store."""
