-- name, run, entry, most at once, a job that goes on or '', then what submit takes
-- -> {'stop' | 'full' | 'gone' | 'busy' | 'ok', job}
local name, entry, job = ARGV[1], ARGV[3], ARGV[5]
local state, run = unpack(redis.call('HMGET', catalog_key(name), 'state', 'run'))
if state ~= 'running' or run ~= ARGV[2] then return { 'stop', '' } end
if redis.call('HLEN', catalog_key(name, 'active')) >= tonumber(ARGV[4]) then return { 'full', '' } end
if not redis.call('ZSCORE', catalog_key(name, 'todo'), entry) then return { 'gone', '' } end
if job == '' then
  local _, active_key
  job, _, active_key = enqueue(ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], now())
  if active_key ~= ARGV[7] then return { 'busy', job } end
end
redis.call('ZREM', catalog_key(name, 'todo'), entry)
redis.call('HDEL', catalog_key(name, 'again'), entry)
redis.call('HSET', catalog_key(name, 'active'), entry, job)
return { 'ok', job }
