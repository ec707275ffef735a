-- stream, group, ms -> how many deliveries were noted at a time that is yet to come: this server's clock jumped back.
-- They count as `ms` old from now on, or what a dead process had would be waited for as long as the jump.
local function labelled(reply, label)
  for i = 1, #reply, 2 do if reply[i] == label then return reply[i + 1] end end
end

if redis.call('EXISTS', ARGV[1]) == 0 then return 0 end
local t, found = now(), 0
for _, group in ipairs(labelled(redis.call('XINFO', 'STREAM', ARGV[1], 'FULL', 'COUNT', 100), 'groups')) do
  for _, one in ipairs(labelled(group, 'name') == ARGV[2] and labelled(group, 'pending') or {}) do
    local id, consumer, delivered = unpack(one)
    if delivered > t + SLACK then
      redis.call('XCLAIM', ARGV[1], ARGV[2], consumer, 0, id, 'IDLE', ARGV[3], 'JUSTID')
      found = found + 1
    end
  end
end
return found
