-- Tasks whose ends are not all recorded by the control plane, changed after a cursor.
-- ARGV: prefix, cursor, limit
redis.call('DEL', NEWS)
local out = { tostring(NOW) }
local ids = redis.call('ZRANGEBYSCORE', CHANGED, '(' .. ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[3])
for i = 1, #ids, 2 do
  out[#out + 1] = { ids[i], ids[i + 1], redis.call('HMGET', task(ids[i]), 'issued_epoch', 'status', 'node',
    'started_at', 'last_heartbeat', 'expired_at', 'expired_state', 'returned', 'resumed_at', 'done_at', 'freed_at',
    'detail', 'result') }
end
return out
