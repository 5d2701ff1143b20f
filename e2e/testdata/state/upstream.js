// An API that tells which credential it was called with.
require('http').createServer((request, response) => {
  response.setHeader('content-type', 'application/json');
  response.end(JSON.stringify({ auth: request.headers.authorization || 'none' }));
}).listen(9797, '127.0.0.1', () => console.log('listening'));
