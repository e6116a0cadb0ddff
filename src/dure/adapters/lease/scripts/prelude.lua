-- Put before every script. ARGV[1] is the prefix of all keys; KEYS[1] only names the slot.
-- Times are milliseconds of this server's own clock: clocks of nodes are not trusted.
local P = ARGV[1]
local T = redis.call('TIME')
local NOW = T[1] * 1000 + math.floor(T[2] / 1000)
local PENDING, DISPATCHED = P .. 'task:queue:pending', P .. 'task:queue:dispatched'
local DELAYED, CHANGED, NEWS = P .. 'task:queue:delayed', P .. 'task:changed', P .. 'task:news'
local KEEP_MS, EVIDENCE_MS = 7 * 86400000, 86400000

local function task(id) return P .. 'task:' .. id end
local function beat_key(id) return P .. 'task:heartbeat:' .. id end
local function node_key(node) return P .. 'node:state:' .. node end
local function number(text) return tonumber(text or 0) or 0 end

-- Tell the control plane: a place in the order of changes, and one ring at its door.
local function changed(id)
  redis.call('ZADD', CHANGED, redis.call('INCR', P .. 'task:seq'), id)
  if redis.call('LLEN', NEWS) == 0 then redis.call('RPUSH', NEWS, '1') end
end

-- Ring at a node's door; rings that nobody has heard yet need no second one.
local function ring(node)
  local door = P .. 'node:wake:' .. node
  if redis.call('LLEN', door) == 0 then redis.call('RPUSH', door, '1') end
end

-- Take a task out of every queue it may stand in.
local function unqueue(id, status, node)
  if status == 'PENDING' then redis.call('LREM', PENDING, 0, id) end
  redis.call('ZREM', DISPATCHED, id)
  redis.call('ZREM', DELAYED, id)
  redis.call('ZREM', P .. 'task:queue:nodewait:' .. (node or ''), id)
  redis.call('DEL', beat_key(id))
end

-- Whether a ticket is the lease in force.
local function holds(f_epoch, f_lease, f_fenced, epoch, lease)
  return f_epoch == epoch and f_lease == lease and lease ~= '' and number(f_fenced) < tonumber(epoch)
end
