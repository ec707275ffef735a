-- why. An orderly hand-back costs no attempt.
if tonumber(unit(id, name, 'attempts') or 0) > 0 then
  redis.call('HINCRBY', key(id, 'units'), name .. '.attempts', -1)
end
free(id, name, 0)
event(id, 'released', 'unit', name, 'why', ARGV[4])
return { 'ok', settle(id, t) }
