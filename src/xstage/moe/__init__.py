"""Parts of a mixture-of-experts layer over several ranks: shapes, quantisation, routing, layout, reference. No operator yet."""
