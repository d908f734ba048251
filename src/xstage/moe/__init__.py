"""Parts of a mixture-of-experts layer over several ranks: shapes, quantisation, routing, layout, exchange, reference. No operator yet."""
