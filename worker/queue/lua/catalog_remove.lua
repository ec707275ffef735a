-- name -> {'missing' | 'refused' | 'ok', the state it found}
-- All that is kept of a catalog goes, what its targets were among it; its jobs and the targets stay.
local name = ARGV[1]
local found = redis.call('HGET', catalog_key(name), 'state')
if not found then return { 'missing', '' } end
if UNDER_WAY[found] or redis.call('HLEN', catalog_key(name, 'active')) > 0 then return { 'refused', found } end
for _, part in ipairs({ 'entries', 'todo', 'again', 'ended', 'counts', 'record' }) do
  redis.call('DEL', catalog_key(name, part))
end
redis.call('DEL', catalog_key(name))
redis.call('SREM', PREFIX .. 'catalogs', name)
redis.call('HDEL', PREFIX .. 'catalogs:success', name)
redis.call('HDEL', PREFIX .. 'catalogs:trouble', name)
return { 'ok', found }
