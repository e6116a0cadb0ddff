-- A node leaves in order. off: its leases are returned at once; restart: kept for one more TTL.
-- ARGV: prefix, node, kind, ttl_ms, (id, epoch, lease_id)*
local node, off = ARGV[2], ARGV[3] == 'off'
redis.call('HSET', node_key(node), 'bye', ARGV[3], 'bye_at', NOW)
if off then redis.call('HSET', node_key(node), 'status', 'OFFLINE') end
for i = 5, #ARGV, 3 do
  local id, epoch = ARGV[i], ARGV[i + 1]
  local k = task(id)
  local f = redis.call('HMGET', k, 'status', 'lease_epoch', 'lease_id', 'fenced_epoch', 'seq')
  local live = f[1] == 'DISPATCHED' or f[1] == 'RUNNING'
  if live and holds(f[2], f[3], f[4], epoch, ARGV[i + 2]) then
    if off then
      unqueue(id, f[1], node)
      redis.call('HSET', k, 'status', 'NODE_WAIT', 'expired_at', NOW, 'expired_state', 'OFFLINE', 'returned', '1',
        'node_wait_since', NOW)
      redis.call('ZADD', P .. 'task:queue:nodewait:' .. node, number(f[5]), id)
      changed(id)
    else
      redis.call('SET', beat_key(id), node .. ':' .. epoch, 'PX', ARGV[4])
    end
  end
end
if redis.call('LLEN', NEWS) == 0 then redis.call('RPUSH', NEWS, '1') end
return 'OK'
