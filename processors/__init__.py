"""The reference application: a shop with orders, payments, stock and customers."""
