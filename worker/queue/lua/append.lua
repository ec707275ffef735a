-- ARGV: when, kind, and its fields: an event of a catalog or a schedule, in the transaction that makes it true.
publish_at(unpack(ARGV))
