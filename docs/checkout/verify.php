<?php
// Verifies an address that Payfold sent a payer back to, and signs launch links. PHP 7.4 and later, no packages. As a command:
//   PAYFOLD_SIGNING_SECRET=psec_… php verify.php return 'https://agency.example/pay/done?…' [NOW]
// return or cancel: the kind of the address. NOW: Unix seconds instead of the clock, to try the test vectors of the guide.

const TOLERANCE_SECONDS = 300;

// parse_str() and $_GET change names (a.b becomes a_b) and drop repeated ones: the pairs are read by hand.
function pairs_of(string $query): array
{
    $pairs = [];
    foreach (explode('&', $query) as $pair) {
        if ($pair === '') continue;
        $parts = explode('=', $pair, 2);
        $pairs[] = [urldecode($parts[0]), urldecode($parts[1] ?? '')];
    }
    return $pairs;
}

// $kind: return, cancel, link or intake. $pairs: [name, value] lists, decoded; sig among them is left out.
function sign(string $secret, string $kind, string $address, array $pairs): string
{
    $url = parse_url($address);
    $port = isset($url['port']) ? ":{$url['port']}" : '';
    $encoded = [];
    foreach ($pairs as [$name, $value]) {
        if ($name !== 'sig') $encoded[] = [rawurlencode($name), rawurlencode($value)];
    }
    usort($encoded, fn ($a, $b) => strcmp($a[0], $b[0]) ?: strcmp($a[1], $b[1]));
    $query = implode('&', array_map(fn ($pair) => "$pair[0]=$pair[1]", $encoded));
    $path = $url['path'] ?? '/';
    return hash_hmac('sha256', "v1\n$kind\n{$url['scheme']}://{$url['host']}$port$path\n$query", $secret);
}

// The parameters of the address; throws what is wrong. $secrets: one, or two while you change it.
function verify(array $secrets, string $kind, string $address, ?int $now = null): array
{
    $pairs = pairs_of(parse_url($address, PHP_URL_QUERY) ?? '');
    $values = array_column($pairs, 1, 0);
    $right = false;
    foreach ($secrets as $secret) {
        $right = hash_equals(sign($secret, $kind, $address, $pairs), $values['sig'] ?? '') || $right;
    }
    if (!$right) throw new RuntimeException('the signature does not match');
    if (abs(($now ?? time()) - (int) ($values['t'] ?? 0)) > TOLERANCE_SECONDS) throw new RuntimeException('the signature is too old');
    return $values;
}

if (PHP_SAPI === 'cli' && realpath($argv[0]) === __FILE__) {
    if ($argc < 3 || !getenv('PAYFOLD_SIGNING_SECRET')) {
        fwrite(STDERR, "PAYFOLD_SIGNING_SECRET=psec_… php verify.php return|cancel 'https://agency.example/pay/done?…' [NOW]\n");
        exit(2);
    }
    try {
        $now = $argc > 3 ? (int) $argv[3] : null;
        echo json_encode(verify([getenv('PAYFOLD_SIGNING_SECRET')], $argv[1], $argv[2], $now)), "\n";
    } catch (RuntimeException $error) {
        fwrite(STDERR, $error->getMessage() . "\n");
        exit(1);
    }
}
