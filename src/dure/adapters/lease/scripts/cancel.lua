-- Ask for a stop. A task nobody has claimed ends here; a holder learns it with its next beat.
-- ARGV: prefix, id, epoch, stop (JSON)
local id, epoch = ARGV[2], ARGV[3]
local k = task(id)
local f = redis.call('HMGET', k, 'status', 'issued_epoch', 'fenced_epoch', 'node', 'cancel')
if not f[1] or f[2] ~= epoch or number(f[3]) >= tonumber(epoch) then return 'UNKNOWN' end
if f[1] == 'PENDING' then
  unqueue(id, f[1], f[4])
  redis.call('HSET', k, 'status', 'CANCELLED', 'done_at', NOW, 'freed_at', NOW, 'detail', 'stopped before it started')
  changed(id)
  return 'ENDED'
end
if f[1] == 'DONE' or f[1] == 'DEAD' or f[1] == 'CANCELLED' then return 'TERMINAL' end
if f[5] then return 'KNOWN' end
redis.call('HSET', k, 'cancel', ARGV[4])
ring(f[4])
return 'ASKED'
